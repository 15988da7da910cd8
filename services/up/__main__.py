from services.up.main import main

main()
