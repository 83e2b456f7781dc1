from fuzzing.command import main

main()
